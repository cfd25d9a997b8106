"""A model as other programs take it: safetensors, config.json, tokenizer and PyTorch files for transformers; and back.

writing.write(exported, tokenizer, folder, dtype, shard_bytes)
reading.read_export(folder)     # the same `Exported`; nothing in the folder is executed
"""
