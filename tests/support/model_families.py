"""Tiny random models of every family, made offline: three layers of width 32, gains and biases moved off 1 and 0."""

from __future__ import annotations

import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

PLAIN = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = PLAIN | {"num_key_value_heads": 2}
WITH_HEAD = GROUPED | {"head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64} | SPECIAL

# name: model class, configuration class, options; families by their name in transformers, variants behind a dash
FAMILIES = {
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, GPT),
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, GROUPED),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, GROUPED),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, WITH_HEAD),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig, GROUPED | {"sliding_window": 8}),
    "gpt_neox": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, PLAIN),
    "gpt_neox-sequential": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, PLAIN | {"use_parallel_residual": False}),
    "gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config, WITH_HEAD),
    "gemma3": (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, WITH_HEAD),
    "phi3": (tf.Phi3ForCausalLM, tf.Phi3Config, GROUPED),
    "olmo2": (tf.Olmo2ForCausalLM, tf.Olmo2Config, GROUPED),
    "cohere": (tf.CohereForCausalLM, tf.CohereConfig, GROUPED),
    "gpt_oss": (
        tf.GptOssForCausalLM,
        tf.GptOssConfig,
        WITH_HEAD | EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "mixtral": (tf.MixtralForCausalLM, tf.MixtralConfig, GROUPED | EXPERTS),
    "qwen3_moe": (
        tf.Qwen3MoeForCausalLM,
        tf.Qwen3MoeConfig,
        WITH_HEAD | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "opt": (
        tf.OPTForCausalLM,
        tf.OPTConfig,
        {name: value for name, value in PLAIN.items() if name != "intermediate_size"}
        | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "bert": (tf.BertForMaskedLM, tf.BertConfig, PLAIN),
    "roberta": (tf.RobertaForMaskedLM, tf.RobertaConfig, PLAIN),
    "albert": (tf.AlbertForMaskedLM, tf.AlbertConfig, PLAIN | {"embedding_size": 16}),
    "distilbert": (
        tf.DistilBertForMaskedLM,
        tf.DistilBertConfig,
        {"vocab_size": 96, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64},
    ),
    "mpnet": (tf.MPNetForMaskedLM, tf.MPNetConfig, PLAIN),
    "modernbert": (
        tf.ModernBertForMaskedLM,
        tf.ModernBertConfig,
        PLAIN | {"cls_token_id": 1, "sep_token_id": 2},
    ),
    "granite": (tf.GraniteForCausalLM, tf.GraniteConfig, GROUPED | {"residual_multiplier": 0.5}),
    "t5": (
        tf.T5EncoderModel,
        tf.T5Config,
        {"vocab_size": 96, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 3, "num_heads": 4},
    ),
    "vit": (
        tf.ViTModel,
        tf.ViTConfig,
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
    ),
    "gptj": (tf.GPTJForCausalLM, tf.GPTJConfig, GPT | {"rotary_dim": 4}),
    "bloom": (tf.BloomForCausalLM, tf.BloomConfig, {"vocab_size": 96, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "falcon": (
        tf.FalconForCausalLM,
        tf.FalconConfig,
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4} | SPECIAL,
    ),
}
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"]
T5 = {"vocab_size": 96, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 3, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
BART = {"vocab_size": 96, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "max_position_embeddings": 64}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
BART |= SPECIAL | {"decoder_start_token_id": 2, "forced_eos_token_id": 2}
# encoder-decoder models, which are recorded as two stacks
PAIRS = {
    "t5-relu": (tf.T5ForConditionalGeneration, tf.T5Config, T5),
    "t5-gated": (tf.T5ForConditionalGeneration, tf.T5Config, T5 | {"feed_forward_proj": "gated-gelu"}),
    "bart": (tf.BartForConditionalGeneration, tf.BartConfig, BART),
    "mbart": (tf.MBartForConditionalGeneration, tf.MBartConfig, BART),
    "marian": (tf.MarianMTModel, tf.MarianConfig, BART),
    "pegasus": (tf.PegasusForConditionalGeneration, tf.PegasusConfig, BART),
    "t5gemma": (
        tf.T5GemmaForConditionalGeneration,
        tf.T5GemmaConfig,
        {"encoder": WITH_HEAD, "decoder": WITH_HEAD, "vocab_size": 96, "decoder_start_token_id": 1, "bos_token_id": 1},
    ),
}
# one of every topology class
CLASSES = ("gpt2", "gpt_neox", "gemma2", "bert", "granite", "albert", "mixtral", "bloom")


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A random model in eval mode whose norms have gains and biases of their own."""
    kind, config, options = (FAMILIES | PAIRS)[family]
    torch.manual_seed(seed)
    model = kind(config(**options)).eval().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 1:
                value += 0.1 * torch.randn(value.shape, generator=generator).to(value)
    if dtype == torch.float64 and "experts" in family + " ".join(options):
        model.set_experts_implementation("eager")  # the fast one knows no float64
    return model


def inputs_of(family: str, *, batch: int = 3, n: int = 13, seed: int = 1) -> torch.Tensor:
    """Token ids, or images for a model that sees."""
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        return torch.randn(batch, 3, 16, 16, generator=generator)
    return torch.randint(3, 96, (batch, n), generator=generator)


def letters(*, framed: bool) -> tf.PreTrainedTokenizerFast:
    """A tokenizer of letters, with a special token on both sides where framed."""
    made = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if framed:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )


def pair_inputs(*, seed: int = 1) -> dict[str, torch.Tensor]:
    """Texts of 4 to 11 tokens for an encoder, and others of 3 to 7 for its decoder, padded."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for prefix, lengths in (("", (11, 4, 8)), ("decoder_", (3, 7, 6))):
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(3, 96, mask.shape, generator=generator)
        inputs |= {f"{prefix}input_ids": ids * mask, f"{prefix}attention_mask": mask}
    return inputs
