"""The bench: tasks on which mechanisms are compared at equal epsilon, and the results that ship."""
