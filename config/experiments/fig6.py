"""The paper's Fig 6: final losses of the 1.4B against the number of learned attention sinks, baseline and XSA."""

title = "Fig 6: final loss against learned sinks"
figure = "final"
x = "n_sink"
x_label = "learned sink tokens"
y_limits = [2.52, 2.58]

base = ["config/1.4b.py"]
grid = {"n_sink": [0, 1, 4], "attention": ["sa", "xsa"]}

tiny = {"base": ["config/tiny.py"], "seeds": [1337, 1338]}
