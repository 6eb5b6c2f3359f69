"""``python -m tests.llama_cpp GGUF``: what llama.cpp predicts, by xllamacpp. Reads lists of tokens as JSON; prints for
each the log probabilities of the most probable next tokens."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    import xllamacpp as llama

    settings = llama.CommonParams()
    settings.model.path = sys.argv[1]
    settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = 64, 1, 1
    settings.warmup = settings.fit_params = False
    settings.verbosity = -1
    # The default rounds keys and values to fp16.
    settings.cache_type_k = settings.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama.Server(settings)
    found = []
    for tokens in json.load(sys.stdin):
        asked = {"prompt": tokens, "n_predict": 1, "temperature": 0.0, "n_probs": 20, "cache_prompt": False}
        (choice,) = server.handle_completions(asked)["choices"]
        first = (choice["logprobs"] or {"content": []})["content"][:1]  # none where a character is not complete
        found.append({it["id"]: it["logprob"] for one in first for it in one["top_logprobs"]})
    print(json.dumps(found), flush=True)
    os._exit(0)  # its threads would go on


if __name__ == "__main__":
    main()
