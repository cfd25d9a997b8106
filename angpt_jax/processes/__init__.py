"""Several processes of one run: what started them, how they meet, wait for each other, agree and end together."""
