"""Training on several ranks: how they are arranged, what each computes, and what they send."""
