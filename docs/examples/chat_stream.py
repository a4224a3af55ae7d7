"""Print a chat's answer as it is generated: python docs/examples/chat_stream.py [MODEL]"""

import sys

from atom_mini import LLM, SamplingParams

with LLM(sys.argv[1] if len(sys.argv) > 1 else "tiny") as llm:
    messages = [{"role": "user", "content": "What is 20 + 21?"}]
    prompt = llm.format_chat(messages)  # token ids, in the model's chat template
    for piece in llm.stream([prompt], SamplingParams(temperature=0, max_tokens=64)):
        print(piece.text, end="", flush=True)
    print()
