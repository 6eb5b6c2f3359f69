"""The models of engine torch: GPT and ResNet-50."""
