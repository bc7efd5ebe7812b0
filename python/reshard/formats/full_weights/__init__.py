"""Full weights in the MindSpore layout: `part<i>.safetensors` and a name map."""
