"""Text → tokens → batches.

in training   tokens (which data) → prepared, shards (on disk) → packing (rows) → pipeline (batches)
in `prepare`  sources (which files) → units (what is read at once) → readers, streams, columns, tfds_sets (its
              documents) → work (one unit to shards) → build (all units, over processes) → workspace, plans (the folder)
in both       corpus (text files), tokenizer_files → tokenizer, words, sentencepieces
"""
