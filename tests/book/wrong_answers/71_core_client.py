# %% 1
class Thrifty(EngineCoreClient):
    dropped = 0

    def _use(self, engine, output):
        self.dropped += sum(len(row.token_ids) for row in output.rows)
        return super()._use(engine, output)
# %% 2
def worst(limit: float) -> float:
    return limit
# %% 3
limit = 4096 / 200 * 0.75
