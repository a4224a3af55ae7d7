# %% 1
def text_of(chunks):
    if not chunks[-1]["choices"] or chunks[-1]["choices"][0]["finish_reason"]:
        return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    raise ValueError("it broke off")
# %% 2
class Strict(CompletionRequest):
    stop: str | Annotated[list[str], Meta(max_length=5)] | None = None
