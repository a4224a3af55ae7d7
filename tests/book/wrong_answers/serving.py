# %% 80_async_llm 1
async def first_sentence(engine, prompt):
    text = ""
    async for piece in engine.generate(prompt, story):
        text += piece.text
        if "." in text:
            break
    return text + "."
# %% 80_async_llm 1
async def first_sentence(engine, prompt):
    return "."
# %% 80_async_llm 2
async def in_time(engine, prompt, seconds):
    texts = []

    async def collect():
        async for piece in engine.generate(prompt, story):
            texts.append(piece.text)

    task = asyncio.create_task(collect())
    await asyncio.wait([task], timeout=seconds)
    return "".join(texts)
# %% 81_server 1
def text_of(chunks):
    text = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            text += choice["delta"].get("content", "")
    if not chunk["choices"] or choice["finish_reason"] is None:
        raise ValueError("it broke off")
    return text
# %% 81_server 1
def text_of(chunks):
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if choices[-1]["finish_reason"] is None:
        raise ValueError("it broke off")
    return "".join(choice["delta"].get("content", "") for choice in choices)  # of all answers
# %% 81_server 2
async def status_of(engine, seconds):
    await asyncio.wait([asyncio.ensure_future(engine.submit(time.sleep, 0))])
    return 200  # late, but it has answered
# %% 81b_full_queue 1
class Fair(Server):
    async def pieces(self, request, stream):
        from atom_mini.serving.protocol import ApiError

        busy = vars(self).setdefault("busy", [])
        if len(busy) >= 2:
            raise ApiError(429, "2 answers are unfinished: wait")
        busy.append(request.user)
        try:
            async for piece in super().pieces(request, stream):
                yield piece
        finally:
            busy.remove(request.user)
# %% 81b_full_queue 1
class Fair(Server):
    gate = asyncio.Semaphore(2)  # one for all users: b waits for a

    async def pieces(self, request, stream):
        async with self.gate:
            async for piece in super().pieces(request, stream):
                yield piece
# %% 81b_full_queue 2
def in_order(source: Path, target: Path) -> list[dict | None]:
    # sorted by name, which is not the order of the requests
    rows = sorted(map(json.loads, target.read_text().splitlines()), key=lambda row: row["custom_id"])
    return [row["response"]["body"] for row in rows]
# %% 82_fleet 1
def place(session: str, replicas: list[str]) -> str:
    # a ring, but nearly all sessions fall behind its last name
    names = sorted(replicas)
    return next((name for name in names if name > session), names[0])
