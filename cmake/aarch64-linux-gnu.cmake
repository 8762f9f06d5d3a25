# Toolchain for 64-bit Arm from another kind of machine: the cross compiler of Debian and Ubuntu, and
# QEMU's user emulator for what it builds. `make test-aarch64` uses it.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
