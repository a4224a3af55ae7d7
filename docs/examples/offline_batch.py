"""Complete many prompts at once: python docs/examples/offline_batch.py [MODEL]"""

import sys

from atom_mini import LLM, SamplingParams

FACTS = "Ada lives in Rome. Ben likes plums. Mia has a red cat."
QUESTIONS = ["Where does Ada live?", "What does Ben like?", "What does Mia have?"]

with LLM(sys.argv[1] if len(sys.argv) > 1 else "tiny") as llm:
    prompts = [f"{FACTS} {question}" for question in QUESTIONS]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"{question}{output.text}  ({output.num_cached_tokens} prompt tokens from the cache)")
