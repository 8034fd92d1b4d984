"""The paper's Fig 4: final losses of the 1.4B against the peak learning rate, baseline and XSA."""

title = "Fig 4: final loss against peak learning rate"
figure = "final"
x = "learning_rate"
x_label = "peak learning rate"
x_scale = "log"
y_limits = [2.50, 2.62]

base = ["config/1.4b.py"]
grid = {"learning_rate": [1e-4, 2e-4, 4e-4, 6e-4], "attention": ["sa", "xsa"]}

tiny = {"base": ["config/tiny.py"], "grid": {"learning_rate": [1e-3, 2e-3, 4e-3, 6e-3]}}
