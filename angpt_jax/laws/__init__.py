"""Scaling laws of finished runs, on plain arrays: no files, no devices.

`points` says what a run is here, `loss` fits L(N, D), `optima` fits where a loss is lowest, `bootstrap` says how sure
that is, `fits` makes all of them for the runs of one architecture.
"""
