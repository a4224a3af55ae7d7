# %% 1
class Fair(Server):
    async def pieces(self, asked, stream):
        busy = vars(self).setdefault("busy", [])
        if len(busy) >= 2:
            raise ApiError(429, "2 answers are under way: wait")
        busy.append(asked.user)
        try:
            async for piece in super().pieces(asked, stream):
                yield piece
        finally:
            busy.remove(asked.user)
# %% 2
class Told(Server):
    def __init__(self, *args):
        super().__init__(*args)
        self.routes.append(Route(f"/v1/models/{self.model}", self.models))
