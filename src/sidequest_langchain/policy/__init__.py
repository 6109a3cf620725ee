"""The managed cache: facts about the tree, decisions over them, and the hand that acts."""
