package io.photon.grpc;

import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.Status;
import io.photon.grpc.v1.MultiplexGenerateRequest;
import io.photon.grpc.v1.MultiplexGenerateResponse;
import io.photon.grpc.v1.MultiplexItem;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** One MultiplexGenerate call and the requests that share it. Its frames are read at once, whoever they are for. */
final class MultiplexStream extends ClientCall.Listener<MultiplexGenerateResponse> {
  /** Servers tell no more of an id, by which the answer finds its request. */
  private static final int MAX_ID_CHARS = 128;

  /** Frames that may be under way: to ask for each costs the connection's thread a turn. */
  private static final int PREFETCH = 16;

  private final ClientCall<MultiplexGenerateRequest, MultiplexGenerateResponse> call;
  /** Those in flight. */
  private final Map<String, MultiplexedCall> byId = new HashMap<>();

  private final Map<Integer, MultiplexedCall> byHandle = new HashMap<>();
  /** The server takes no request here any more. */
  private boolean isLeaving;

  /** Why the stream is over; null while it is not. */
  private PhotonException error;

  MultiplexStream(ClientCall<MultiplexGenerateRequest, MultiplexGenerateResponse> call) {
    this.call = call;
    call.start(this, new Metadata());
    call.request(PREFETCH);
  }

  synchronized boolean isOver() {
    return error != null;
  }

  synchronized boolean isLeaving() {
    return isLeaving;
  }

  /** Send a request; one that cannot be sent fails. */
  void ask(MultiplexedCall asked) {
    PhotonException refused;
    synchronized (this) {
      refused = error != null ? error : refusal(asked.id());
      if (refused == null) {
        byId.put(asked.id(), asked);
        call.sendMessage(MultiplexGenerateRequest.newBuilder().setGenerate(asked.request()).build());
      }
    }
    if (refused != null) {
      asked.end(refused);
    }
  }

  synchronized void cancel(MultiplexedCall asked) {
    if (error == null && byId.get(asked.id()) == asked) {
      var cancel = MultiplexGenerateRequest.Cancel.newBuilder().setRequestId(asked.id());
      call.sendMessage(MultiplexGenerateRequest.newBuilder().setCancel(cancel).build());
    }
  }

  /** End what still runs. */
  void close() {
    call.cancel("closed by its caller", null);
    fail(new PhotonException.Closed("the stream was closed"));
  }

  @Override
  public void onMessage(MultiplexGenerateResponse frame) {
    for (var item : frame.getItemsList()) {
      tell(item);
    }
    call.request(1);
  }

  @Override
  public void onClose(Status status, Metadata trailers) {
    fail(
        status.isOk()
            ? new PhotonException.Unreachable("the server has ended the stream")
            : Statuses.error(status, trailers));
  }

  private void tell(MultiplexItem item) {
    var isLast = item.hasError() || item.getResponse().hasTiming();
    var asked = find(item, isLast);
    if (asked == null) {
      return;
    }
    if (item.hasResponse()) {
      asked.tell(item.getResponse());
    }
    if (isLast) {
      asked.end(item.hasError() ? error(item) : null);
    }
  }

  private PhotonException error(MultiplexItem item) {
    var told = Statuses.error(item.getError());
    if (told instanceof PhotonException.Draining) {
      synchronized (this) {
        isLeaving = true;
      }
    }
    return told;
  }

  private synchronized MultiplexedCall find(MultiplexItem item, boolean isLast) {
    var asked = byHandle.get(item.getHandle());
    if (asked == null) {
      asked = byId.get(item.getRequestId());
      if (asked != null) {
        byHandle.put(item.getHandle(), asked);
      }
    }
    if (asked != null && isLast) {
      byHandle.remove(item.getHandle());
      byId.remove(asked.id());
    }
    return asked;
  }

  private void fail(PhotonException reason) {
    List<MultiplexedCall> failed;
    synchronized (this) {
      if (error != null) {
        return;
      }
      error = reason;
      failed = List.copyOf(byId.values());
      byId.clear();
      byHandle.clear();
    }
    failed.forEach(asked -> asked.end(reason));
  }

  private PhotonException refusal(String id) {
    if (id.length() > MAX_ID_CHARS) {
      var problem = "has " + id.length() + " characters; " + MAX_ID_CHARS + " may";
      return new PhotonException.InvalidRequest("request_id", problem);
    }
    if (!byId.containsKey(id)) {
      return null;
    }
    var facts = PhotonException.Facts.of(Status.Code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID");
    return PhotonException.of("'" + id + "' is in flight on this stream", facts);
  }
}
