"""Answer a few prompts with a small model on any machine: `make run`, or `python examples/offline.py [MODEL]`."""

import sys

from pyvllm import LLM, SamplingParams

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


def main() -> None:
    """Complete the prompts, then ask one question as a chat."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=0)
    with LLM(model) as llm:
        for output in llm.generate(PROMPTS, params):
            print(f"Prompt: {output.prompt!r}, generated text: {output.outputs[0].text!r}")

        question = "What is a prime number?"
        answer = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0.0, max_tokens=64))
        print(f"\nQuestion: {question}\nAnswer: {answer[0].outputs[0].text.strip()}")


if __name__ == "__main__":
    main()
