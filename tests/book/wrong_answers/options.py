# %% 21_together 1
calm_row = Need("trace=True", has("trace", True), {"overlap": (False,)}, "records are easier to read")
# %% 21_together 2
def implied(options):
    usual, known = vars(EngineArgs("tiny")), vars(EngineArgs("tiny", **options))
    return {n for n in known if n != "hf_config" and known[n] != usual[n]}
