"""A tiny model and its tokenizer, saved as transformers saves them."""

from exptilt.lens import models

LETTERS = 100


def save_tiny(folder, *, seed=0, vocabulary=LETTERS, tokenizer=True):
    """A GPT-2 of two layers with random weights, and the letters of the default model as its tokenizer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    if tokenizer:
        default_tokenizer().save_pretrained(folder)
    return folder


def default_tokenizer():
    return models.load_tokenizer(models.find_checkpoints([models.default_folder()])[-1][1])
