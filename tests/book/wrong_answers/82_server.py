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
class Fair(Server):
    async def pieces(self, request, stream):
        busy = vars(self).setdefault("busy", [])
        if len(busy) >= 2:
            raise ApiError(429, "2 answers are unfinished: wait")
        busy.append(request.user)
        try:
            async for piece in super().pieces(request, stream):
                yield piece
        finally:
            busy.remove(request.user)
