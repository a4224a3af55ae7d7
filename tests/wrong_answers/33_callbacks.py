# %% 1
def first_sentence(llm: LLM, prompt: str) -> str:
    text = llm.generate(prompt, SamplingParams(max_tokens=64))[0].text
    return text[: text.index(".") + 1]
