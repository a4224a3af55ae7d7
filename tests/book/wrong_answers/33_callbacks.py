# %% 1
def first_sentence(llm: LLM, prompt: str) -> str:
    text = llm.generate(prompt, SamplingParams(max_tokens=64))[0].text
    return text[: text.index(".") + 1]
# %% 2
def share(llm: LLM, prompts: list[str], total: int) -> dict[int, list[int]]:
    told = {}
    def hear(piece) -> None:
        told.setdefault(piece.index, []).extend(piece.token_ids)
        if sum(map(len, told.values())) >= total:
            llm.abort(piece.index)  # the others go on
    llm.generate(prompts, StreamParams(max_tokens=64, stream_callback=hear))
    return told
