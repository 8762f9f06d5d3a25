// Of a program that has no main() of its own.
#include "check.hpp"

int main() {
  for (const check::Test& test : check::tests()) {
    test.run();
    std::cout << "passed: " << test.name << std::endl;
  }
}
