# %% 1
loud_row = Row("loud=True", has("loud", True), {"scheduler": ("atom",)}, "shouting takes no turns")
# %% 2
def implied(options):
    usual, known = vars(Config("tiny")), vars(Config("tiny", **options))
    return {n for n in known if n != "hf_config" and known[n] != usual[n]}
