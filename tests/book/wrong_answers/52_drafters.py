# %% 1
class Latest(NgramDrafter):
    def _find(self, seq):
        return seq.num_tokens  # guesses nothing

text_for_latest = [1] * 8
# %% 2
brings_more = False
