"""Import path of verl.compat.tokenizers."""

from verl.compat.tokenizers import hf_processor, hf_tokenizer, normalize_token_ids, set_pad_token_id

__all__ = ["hf_processor", "hf_tokenizer", "normalize_token_ids", "set_pad_token_id"]
