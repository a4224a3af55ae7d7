# %% 1
async def first_sentence(engine, prompt):
    text = ""
    async for piece in engine.generate(prompt, story):
        text += piece.text
        if "." in text:
            break
    return text + "."
# %% 2
async def in_time(engine, prompt, seconds):
    texts = []

    async def collect():
        async for piece in engine.generate(prompt, story):
            texts.append(piece.text)

    task = asyncio.create_task(collect())
    await asyncio.wait([task], timeout=seconds)
    return "".join(texts)
