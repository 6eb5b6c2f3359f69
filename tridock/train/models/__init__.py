"""The models that engine torch trains: GPT and ResNet-50."""
