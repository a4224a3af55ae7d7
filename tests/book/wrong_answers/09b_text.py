# %% 1
text, num_seen = "Where does Ada live?", 6  # all of the stop string
# %% 2
first_wrong, both_wrong = "é".encode(), "漢".encode()
