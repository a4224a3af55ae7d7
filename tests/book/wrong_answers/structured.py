# %% 21_structured_outputs 1
CLOCK = {
    "start": {"012": "hour"}, "hour": {DIGITS: "colon"}, "colon": {":": "minutes"},  # 29:00
    "minutes": {"012345": "last"}, "last": {DIGITS: "end"},
}  # fmt: skip
ENDS = {"end"}
# %% 21_structured_outputs 1
CLOCK = {
    "start": {"01": "any hour", "2": "late hour"}, "any hour": {DIGITS: "colon"}, "late hour": {"0123": "colon"},
    "colon": {":": "minutes"}, "minutes": {"012345": "last"}, "last": {DIGITS: "end"},
}  # fmt: skip
ENDS = {"last", "end"}  # 09:4
# %% 21_structured_outputs 2
def must_follow(form, tokens):
    mask = form.mask(vocabulary, tokens)  # one token alone
    ids = [] if mask is None else np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    return ids if len(ids) == 1 else []
# %% 21_structured_outputs 2
def must_follow(form, tokens):
    found = []
    while (mask := form.mask(vocabulary, (*tokens, *found))) is not None:
        ids = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if len(ids) > 2:  # two are a choice, too
            break
        found += ids[:1]
    return found
# %% 21_structured_outputs 2
def must_follow(form, tokens):
    found = []
    while (mask := form.mask(vocabulary, (*tokens, *found))) is not None:
        ids = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if len(ids) != 1:  # a lone end is returned, too
            break
        found += ids
    return found
