//! libnvidia-ml.so.1: NVML over an rgpu session.
