"""Start the processes of a job, watch over them, and look at what they left."""
