# %% 1
class Fair(Server):
    async def generate(self, exchange, asked):
        busy = vars(self).setdefault("busy", [])
        if len(busy) >= 2:
            raise ApiError(429, "2 answers are under way: wait")
        busy.append(asked.user)
        try:
            await super().generate(exchange, asked)
        finally:
            busy.remove(asked.user)
# %% 2
class Told(Server):
    def __init__(self, *args):
        super().__init__(*args)
        self.routes[f"/v1/models/{self.model}"] = ("GET", self.models)
