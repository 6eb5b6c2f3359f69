"""Training samples: data sets, index maps, prefetching."""
