"""From text to batches: corpus (documents), tokenizer, tokens (token files on disk), pipeline (grain batches)."""
