package io.photon.grpc;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.util.Map;
import java.util.function.BiFunction;
import org.junit.jupiter.api.Test;

/** Mistakes that are found before anything is sent. */
class RequestTest {
  private static final Map<String, BiFunction<Request, Integer, Request>> COUNTS =
      Map.of(
          "sampling.num_outputs", Request::numOutputs,
          "stop.max_tokens", Request::maxTokens,
          "stop.min_tokens", Request::minTokens,
          "output.logprobs", Request::logprobs,
          "output.prompt_logprobs", Request::promptLogprobs,
          "stream.max_tokens_per_message", Request::maxTokensPerMessage);

  @Test
  void aNegativeCountIsRefusedByItsField() {
    COUNTS.forEach(
        (field, setter) -> {
          setter.apply(Request.text("x"), 0);
          var request = Request.text("x");
          var error = assertThrows(PhotonException.InvalidRequest.class, () -> setter.apply(request, -1), field);
          assertEquals(field, error.field());
          assertEquals(field + ": -1 is negative", error.getMessage());
        });
  }
}
