"""A new tokenizer and a new Llama: byte-level BPE, distinct special tokens, a chat template, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.errors import UserError

BOS, EOS, PAD, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|> {{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|> {{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant turns are known') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(folder: str, texts: list[str], architecture: dict[str, Any], seed: int) -> None:
    """Write tokenizer and untrained model as a Hugging Face folder. Raises UserError when the vocabulary has no room."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if architecture["vocab_size"] < len(alphabet) + 5:
        raise UserError(
            f"architecture.vocab_size: {architecture['vocab_size']} is below {len(alphabet) + 5}: all bytes and 5 special tokens"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [" " + line for text in texts for line in text.split("\n")],
        trainers.BpeTrainer(
            vocab_size=architecture["vocab_size"],
            special_tokens=[PAD, BOS, EOS, USER, ASSISTANT],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD, additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE, model_max_length=architecture["context"], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=architecture["hidden_size"], intermediate_size=architecture["intermediate_size"],
        num_hidden_layers=architecture["layers"], num_attention_heads=architecture["heads"], num_key_value_heads=architecture["heads"],
        max_position_embeddings=architecture["context"], tie_word_embeddings=True, attention_dropout=0.0,
        initializer_range=architecture["init_std"],
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=architecture["embedding_std"])
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
