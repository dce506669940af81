"""Serve prompts that arrive at different times from one model, over one paged cache.

pip install ".[gpt]"
fastattn train --out runs/gpt                            # a model, once
python examples/continuous_batching.py --checkpoint runs/gpt "def main(" "class Token" "import "
"""

# ruff: noqa: T201 (an example prints)

import argparse
from collections import defaultdict

import torch

from fastattn.generation import Engine, Sampling
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training.checkpoint import load_model
from fastattn.training.tokenizers import CharacterTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=["def main(", "class Token", "import "])
    parser.add_argument("--checkpoint", help="a run of fastattn train; default: an untrained model")
    parser.add_argument("--count", type=int, default=60, help="tokens for each prompt")
    parser.add_argument("--every", type=int, default=5, help="steps between arrivals")
    parser.add_argument("--pages", type=int, default=64)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    if options.checkpoint:
        model, tokenizer = load_model(options.checkpoint, device=device)
    else:
        tokenizer = CharacterTokenizer("".join(sorted(set("".join(options.prompts)))))
        config = GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=2, context_length=128)
        model = GPT(config).to(device)
    engine = Engine(model.eval(), num_pages=options.pages, page_size=16, max_batch=8)

    waiting = list(options.prompts)
    names, shown = {}, defaultdict(list)
    step = 0
    while waiting or engine.busy:
        if waiting and step % options.every == 0:
            prompt = waiting.pop(0)
            sampling = Sampling(temperature=0.8, top_p=0.9)
            request = engine.submit(
                tokenizer.encode(prompt), options.count, sampling=sampling, seed=len(names)
            )
            names[request] = prompt
        for request, token in engine.step():
            shown[request].append(token)
        step += 1
    for request, prompt in names.items():
        assert shown[request] == request.tokens
        print(f"{prompt!r} -> {tokenizer.decode(request.tokens)!r}")
    print(f"{step} steps, {sum(map(len, shown.values()))} tokens, {engine.preemptions} preemptions")


if __name__ == "__main__":
    main()
