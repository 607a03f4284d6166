"""Edit the forward of a real model, and leave the model as it was."""
