"""Make a tiny real Llama causal LM on the spot: 2 layers, vocabulary of 512, byte-level tokenizer, chat template.

`python tests/tiny_model.py DIR [--seed N] [--eos] [--untied] [--dtype float32|bfloat16]`

Deterministic in its arguments. Without --eos no token ends a completion (neither config nor tokenizer names one);
with it, `<|im_end|>` (id 2) does. The weights are spread widely enough that next-token distributions are far from
uniform and differ from context to context. Imports torch and transformers: run it as a subprocess, or from a test.
"""

import argparse
import json
from itertools import islice, product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
MAX_POSITIONS = 1024
SPECIALS = ("<pad>", "<|im_start|>", "<|im_end|>", "<unk>")
EOS_ID = 2
PAIR_LETTERS = "etaoinshrdlucmfw"
EMBEDDING_SPREAD = 0.2
LAYER_SPREAD = 0.15
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(*, eos: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 4 specials, 256 bytes, and letter pairs up to the vocabulary's size, so every id decodes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(islice(product(PAIR_LETTERS, PAIR_LETTERS), VOCABULARY - len(SPECIALS) - len(alphabet)))
    tokens = [*SPECIALS, *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>" if eos else None,
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        model_max_length=MAX_POSITIONS,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_llama(*, seed: int, eos: bool, tied: bool) -> LlamaForCausalLM:
    """The model in float32, seeded."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOS_ID if eos else None,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                spread = EMBEDDING_SPREAD if "embed_tokens" in name or "lm_head" in name else LAYER_SPREAD
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID if eos else None, pad_token_id=0)
    return model


def write_tiny_model(
    directory: Path, *, seed: int = 0, eos: bool = False, tied: bool = True, dtype: str = "float32"
) -> None:
    """Write the model directory: config, safetensors, tokenizer.json, chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    model = tiny_llama(seed=seed, eos=eos, tied=tied).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    tiny_tokenizer(eos=eos).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eos", action="store_true")
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    write_tiny_model(args.directory, seed=args.seed, eos=args.eos, tied=not args.untied, dtype=args.dtype)
    print(json.dumps({"directory": str(args.directory), "vocabulary": VOCABULARY}))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
