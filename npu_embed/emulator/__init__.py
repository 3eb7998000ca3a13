"""The emulated NPU: a device with pyxrt's API that executes real instruction streams."""
