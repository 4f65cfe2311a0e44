"""What a run tells about itself: a record a logged step, on console, in a file and in TensorBoard, and where it ran."""
