# %% 1
def text_of(chunks):
    text = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            text += choice["delta"].get("content", "")
    if not chunk["choices"] or choice["finish_reason"] is None:
        raise ValueError("it broke off")
    return text
# %% 2
class Strict(CompletionRequest):
    stop: str | Annotated[list[str], Meta(max_length=5)] | None = None
