"""DP-SGD on samples: Opacus with noise on a grid, what is checked before a step, and what is charged."""
