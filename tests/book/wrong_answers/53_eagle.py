# %% 1
def sayable(head, ids):
    return len(head.target_ids) / 958  # of the vocabulary, not of the text
# %% 2
class PostNorm(EagleDrafter):
    def run(self, step, hidden, ids=None):
        states, drafts = super().run(step, hidden, ids)
        if not len(drafts):
            return states, drafts
        return states, self.model.choose(self.model.norm(states, None)[0])  # fed back as it was
