"""Plots of runs: `history` reads their folders, `curves` and `depth` draw, `pictures` lists, `page` shows.

`look` holds what all plots share. Matplotlib is an extra: `history` and `page` do without it.
"""
