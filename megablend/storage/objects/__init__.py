"""Object stores and HTTP servers as storages:
`s3://`, `gs://`, `az://`, `http://` and `https://`, through obstore.

address        the parts of a location: a bucket (or a server) and a key
bucket         requests to a bucket for the state of an object and for ranges; bucket_lister lists it
urls           lists of URLs, as braces and text files; queries of URLs, which are sent and not stored
object_version the version of an object that is read
known_objects  the known versions of objects, and the heads and tails of some
failures       the meaning of the client's errors
credentials    credentials that obstore does not find by itself
obstore_stores obstore's stores, made from options and the environment
clients        the clients of this process, by bucket and options; pauses that sources ask for
loop           the process's event loop, which a forked child cannot use
rate_limiter   limits of the number of requests in flight, and of their rate
timing         the time that a request may take, learned from earlier ones
in_flight      all requests in flight, which one timer checks
workers        a few tasks that send many requests
sockets        ranged GETs without the client, whose responses cost more CPU time; socket_connection is one connection
retry_policy   when a request is tried again, and when it is given up
bucket_client  one ranged GET: its conditions, retries, time-outs and hedges
listing        patterns of keys, and the folders that are listed for them
object_table   the objects of a listing, as a table
store          `ObjectStorage`
prefix         `ObjectPrefix`: whole objects below a prefix, also written
helper         a process that reads for programs which fork later; fork_safe is the storage that uses it
"""
