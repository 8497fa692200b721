"""Sample-level DP-SGD: Opacus with discrete noise, checks before a step, and privacy accounts."""
