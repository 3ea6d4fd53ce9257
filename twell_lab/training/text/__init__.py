"""Texts to train on: read, split, tokenized, kept prepared. Nothing here imports the rest of training."""
