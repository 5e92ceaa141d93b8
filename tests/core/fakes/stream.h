// SPDX-License-Identifier: Apache-2.0
// What the two fakes agree on: a stream is an address of this, so that the fake NCCL can enqueue on the fake device's.
#ifndef SOK_TESTS_FAKES_STREAM_H_
#define SOK_TESTS_FAKES_STREAM_H_

struct FakeStream {
  void (*enqueue)(FakeStream* stream, void (*run)(void* argument), void* argument);
};

#endif  // SOK_TESTS_FAKES_STREAM_H_
