"""A directory that from_pretrained loads: a small random llama with a byte-level tokenizer, and text beside it."""

from __future__ import annotations

from pathlib import Path

import torch

VOCABULARY = 300


def write_model(
    directory: Path, *, tied: bool = True, dtype: torch.dtype = torch.bfloat16, shards: bool = False
) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=133,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=256,
        eos_token_id=257,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(directory, max_shard_size="100KB" if shards else "1GB")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)} | special, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    return directory


def write_text(directory: Path, files: int = 8) -> Path:
    directory.mkdir()
    for index in range(files):
        lines = (f"{number} times {index} is {number * index}." for number in range(200))
        (directory / f"table{index}.txt").write_text("\n".join(lines))
    return directory
