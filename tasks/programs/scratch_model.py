"""A small Llama with random weights, and a tokenizer in which every byte is one token."""

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tasks.params import ScratchModelParams

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")


def make_scratch_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 bytes and three special tokens; it adds no token by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, padding_side="left")


def make_scratch_model(params: ScratchModelParams) -> LlamaForCausalLM:
    """Return the model with weights drawn from ``params.seed``, in fp32; embeddings and head share their weights."""
    tokenizer = make_scratch_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=params.hidden_size,
        num_hidden_layers=params.num_hidden_layers,
        num_attention_heads=params.num_attention_heads,
        num_key_value_heads=params.num_attention_heads,
        intermediate_size=params.intermediate_size,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(params.seed)
        return LlamaForCausalLM(config)
